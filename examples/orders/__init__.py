"""A shop that places orders and tells another system about each of them, exactly when the order exists.

Run it from the repository's root:

    python -m examples.orders          # AsyncSession, Store, Outbox.run
    python -m examples.orders sync     # the same with a plain Session, SyncStore, SyncOutbox.run_once in threads

To learn the library, read in this order:

    models.py                  the application's own model; nothing in it knows of the library
    alembic/versions/          the application's own migrations, one of which makes the library's tables
    service.py                 an order and its message in one transaction, and a rule that rolls both back
    delivery.py                what is done with a message after the commit
    demo.py, demo_sync.py      placing and delivering, side by side

The rest is scenery: receiver.py is the other system, database.py finds a server and migrates a database on it,
run.py holds what a run works with, report.py counts and checks at its end, and __main__.py puts it all together.
"""
