"""What the server sends, for /openapi.json; what it takes is said by the bodies themselves."""
