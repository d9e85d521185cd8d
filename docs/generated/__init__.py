"""Generated parts of the documentation: whole pages, tables, and figures in sentences."""
