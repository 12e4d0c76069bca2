"""What all packages speak: JSON, manifests, names of tensors, the HTTP API, problem documents. No server, no socket."""
