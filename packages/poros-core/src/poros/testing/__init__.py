"""What tests need, for this repository and for architecture packages elsewhere: tiny checkpoints and adapters."""
