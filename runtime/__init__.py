"""The engine at run time: scheduling, execution, text and the clients in front of it."""
