"""Ways for staged blocks to reach another replica, by configuration."""
