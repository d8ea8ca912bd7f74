"""Translation: an encoder-decoder LSTM with attention and two vocabularies."""
