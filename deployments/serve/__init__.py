"""Ray Serve: membership, calls to one particular replica, stopping one, and processes for the next.

All of Mell's use of Serve's private API is here and in `scheduler.listing`. The other rooms of the deployments import
this one, and it imports none of them. Lists of replicas come from Serve's controller; calls go to replicas.
"""
