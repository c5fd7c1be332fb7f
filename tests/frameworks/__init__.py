"""Lightning, Hugging Face, TensorBoard and Weights & Biases."""
