"""Where did the infinity or NaN come from? Parameters by step, and the equation that made the first one."""
