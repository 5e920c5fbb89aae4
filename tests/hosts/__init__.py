"""Two hosts on one machine: the rehearsal of ``make hosts``, and what happens when a host or the network fails.

:mod:`tests.hosts.hosts` makes the hosts, ``python -m tests.hosts`` runs a program on them.
"""
