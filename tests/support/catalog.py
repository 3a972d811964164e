"""What PostgreSQL's catalog says about a schema, for comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from support.rows import Sql

# Each query gives rows that do not depend on oids; %s is the schema's name.
QUERIES: Final = {
    "relations": """
        SELECT relname, relkind, reloptions, relpersistence, relrowsecurity, relforcerowsecurity, relreplident,
            relispartition, relnatts, relchecks, relhasrules, relhastriggers, relacl::text, amname,
            obj_description(c.oid, 'pg_class')
        FROM pg_class c LEFT JOIN pg_am a ON a.oid = c.relam
        WHERE relnamespace = {schema} ORDER BY 1""",
    "columns": """
        SELECT relname, attnum, attname, format_type(atttypid, atttypmod), attnotnull, attidentity, attgenerated,
            attstorage, attcollation, attstattarget, attoptions, attislocal, attisdropped,
            col_description(c.oid, attnum), pg_get_expr(adbin, adrelid)
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
            LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = attnum
        WHERE relnamespace = {schema} AND attnum > 0 ORDER BY relname, attnum""",
    "constraints": """
        SELECT conname, contype, conrelid::regclass::text, condeferrable, condeferred, convalidated, connoinherit,
            pg_get_constraintdef(oid), obj_description(oid, 'pg_constraint')
        FROM pg_constraint WHERE connamespace = {schema} ORDER BY 1, 3""",
    "indexes": """
        SELECT relname, pg_get_indexdef(indexrelid), indisunique, indisprimary, indisvalid, indisready,
            indisclustered, indisreplident
        FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid WHERE relnamespace = {schema} ORDER BY 1""",
    "sequences": """
        SELECT relname, format_type(seqtypid, NULL), seqstart, seqincrement, seqmax, seqmin, seqcache, seqcycle,
            refobjid::regclass::text, refobjsubid, deptype
        FROM pg_sequence JOIN pg_class c ON c.oid = seqrelid
            LEFT JOIN pg_depend ON objid = seqrelid AND classid = 'pg_class'::regclass AND deptype IN ('a', 'i')
        WHERE relnamespace = {schema} ORDER BY 1""",
    "types": "SELECT typname, typtype FROM pg_type WHERE typnamespace = {schema} ORDER BY 1",
    "functions": "SELECT proname FROM pg_proc WHERE pronamespace = {schema} ORDER BY 1",
    "triggers": """
        SELECT relname, tgname FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid
        WHERE relnamespace = {schema} ORDER BY 1, 2""",
    "rules": """
        SELECT relname, rulename FROM pg_rewrite JOIN pg_class c ON c.oid = ev_class
        WHERE relnamespace = {schema} ORDER BY 1, 2""",
    "policies": """
        SELECT relname, polname FROM pg_policy JOIN pg_class c ON c.oid = polrelid
        WHERE relnamespace = {schema} ORDER BY 1, 2""",
}


def catalog(sql: Sql, schema: str) -> dict[str, list[tuple[object, ...]]]:
    """Return all that the catalog knows of the objects in `schema`, with the schema's name as it is."""
    namespace = "(SELECT oid FROM pg_namespace WHERE nspname = %s)"
    return {kind: sql.execute(query.format(schema=namespace), [schema]).fetchall() for kind, query in QUERIES.items()}


def has_schema(sql: Sql, schema: str) -> bool:
    """Tell whether there is a schema of that name."""
    return sql.execute("SELECT FROM pg_namespace WHERE nspname = %s", [schema]).fetchone() is not None
