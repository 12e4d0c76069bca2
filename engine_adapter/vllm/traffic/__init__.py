"""What passes between clients and the engine: let in, labelled with versions, ended by updates."""
