"""Sums of which nobody sees the parts: state machines from messages to messages, whatever carries these."""
