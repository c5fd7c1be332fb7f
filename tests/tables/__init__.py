"""Claims about tables of rows."""
