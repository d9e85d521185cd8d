"""`millpond demo`: the main job on the bundled model, as a table and a picture."""
