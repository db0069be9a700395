"""The measured tables of the READMEs, one file for each subject; `runs/tables.py` writes them into the pages."""
