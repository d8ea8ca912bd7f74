"""A small residual network on images: dense variables only."""
