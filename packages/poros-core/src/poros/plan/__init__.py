"""Planning: where everything lives for a given VRAM budget, and how long a step will take. Torch-free."""
