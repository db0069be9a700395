"""The measured tables of the pages, a file for each subject; `python -m runs.tables` writes them."""
