"""The `poros` command line. No module here imports torch until a verb that needs it runs."""
