"""Programs that train with parallax; each runs unchanged on one worker and on many."""
