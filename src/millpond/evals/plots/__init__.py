"""Pictures of results, drawn with matplotlib. `folder.draw_all` draws what a folder has numbers for."""
