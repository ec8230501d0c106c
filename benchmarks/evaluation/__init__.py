"""The evaluation report: experiments, the raw runs that they need, and the page that is made from these."""
