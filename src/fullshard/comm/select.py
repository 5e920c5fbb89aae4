"""Which transport a group uses (provisional)."""
from fullshard.comm.collective import CollectiveTransport
def select_transport(process_group, device):
    return CollectiveTransport()
