"""A language model with huge sparse tables: LSTM and sampled softmax."""
