"""The commands of ``parallax``, one file each: ``HELP``, ``add_arguments`` and ``run``."""
