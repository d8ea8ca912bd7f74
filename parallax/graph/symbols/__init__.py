"""Numbers as symbols, and the branches on them: guards, checks, endings and guesses."""
