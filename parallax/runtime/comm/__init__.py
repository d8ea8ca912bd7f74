"""How workers talk: collectives, memory shared inside a host, control words, texts."""
