"""The Ray Serve deployments `Engine` and `Scheduler`, and the access to Serve that they share with the ingress.

`app` imports this package; it imports `migration` and `policies`. Requests and orders come from ingresses, the list of
replicas from Serve's controller; tokens go to ingresses, the number of replicas to the controller.
"""
