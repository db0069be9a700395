"""What a GPU has to tell, within the minutes that there are."""
