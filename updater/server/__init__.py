"""Serving over HTTP: who may ask and how much (`guard`, `security`, `networks`), the routes, uvicorn."""
