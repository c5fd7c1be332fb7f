"""Lightning and Hugging Face."""
