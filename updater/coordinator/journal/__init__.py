"""What is durable: the journal, its tables, the manifests beside it, and the folder that all of it lies in."""
