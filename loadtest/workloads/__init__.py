"""What requests ask for. A workload yields sessions; a session is one or more turns of one conversation."""
