"""Which block is where, when: the pure schedule, the slots, the transfers and the streamer that runs them."""
