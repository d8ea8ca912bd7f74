"""VGG on small images: dense variables, most of them in a few large matrices."""
