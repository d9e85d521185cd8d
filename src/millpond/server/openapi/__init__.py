"""The document at /openapi.json: what the server sends; the bodies describe what it takes."""
