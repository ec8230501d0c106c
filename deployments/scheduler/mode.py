"""The mode that epochs are to have: an operator's, until the application is deployed again, else the configured one."""

from deployments.scheduler.listing import Listing
from deployments.serve.modes import ModeOrder, ModeStore
from policies.decision.limits import Mode


class OrderedMode:
    """Follows the orders of operators, in `store`. `configured` is the mode without an order."""

    def __init__(self, configured: Mode, store: ModeStore, listing: Listing) -> None:
        self.configured = configured
        self._store = store
        self._listing = listing
        self._order = store.read()

    @property
    def mode(self) -> Mode:
        """The mode. An order holds as long as it cannot be seen that the application has been deployed again."""
        order, deployed_at = self._order, self._listing.deployed_at
        if order is None:
            return self.configured
        deployed_again = None not in (order.deployed_at, deployed_at) and order.deployed_at != deployed_at
        return self.configured if deployed_again else order.mode

    async def order(self, mode: Mode) -> None:
        """Order a mode for the application as it is deployed now."""
        await self._listing.refresh()
        order = ModeOrder(mode, self._listing.deployed_at)
        self._store.write(order)
        self._order = order
