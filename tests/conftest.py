"""Settings for all tests."""

from hypothesis import settings

# No deadline: machines are shared. Derandomised: CI must not fail on a case that nobody can see again.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
