"""Where entries live: the page pool, the tables of a layer, and the step that writes, attends, plans and applies."""
