"""The subcommands of ``shadowmask``, one module each with ``main(argv)``."""
