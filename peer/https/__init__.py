"""WebSockets (RFC 6455), over TLS or plain: what is left where a network lets nothing but HTTPS out.

    certificate  The TLS certificate of a server, from files; read again when they change.
    dial         Opens a WebSocket to an address, directly or through a proxy.
    proxy        An HTTP proxy (CONNECT): HTTPS_PROXY and NO_PROXY.
    serve        Accepts WebSockets at a bootstrap, over TLS or from a reverse proxy.
    websocket    A WebSocket as the socket of a connection: bytes in binary messages.
"""
