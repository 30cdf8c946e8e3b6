"""A router's UPnP, as far as a peer needs it: answers the search, and passes ports on by nftables.

    python upnp_router.py <address inside> <network device outside>      in the router's namespace

Internet Gateway Device v1: WANIPConnection with AddPortMapping, DeletePortMapping, GetSpecificPortMappingEntry,
GetExternalIPAddress and GetStatusInfo. Like many such routers it takes no lease but a permanent one (error 725).
"""

import re
import socket
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HTTP_PORT = 5000
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>{DEVICE}</deviceType><friendlyName>router</friendlyName><UDN>uuid:1</UDN><deviceList>
<device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><UDN>uuid:2</UDN>
<serviceList><service><serviceType>urn:schemas-upnp-org:service:WANCommonInterfaceConfig:1</serviceType>
<serviceId>urn:upnp-org:serviceId:WANCommonIFC1</serviceId><controlURL>/common</controlURL><eventSubURL>/common</eventSubURL>
<SCPDURL>/common.xml</SCPDURL></service></serviceList><deviceList>
<device><deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><UDN>uuid:3</UDN>
<serviceList><service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/event</eventSubURL><SCPDURL>/ip.xml</SCPDURL></service></serviceList>
</device></deviceList></device></deviceList></device></root>"""

inside, wan = sys.argv[1:]
mappings: dict[str, tuple[str, str]] = {}
"""Outside port -> computer and its port."""


class Refused(Exception):
    """A UPnP error: its number, then its name."""


def write_rules() -> None:
    """Make the router's chain say what `mappings` says."""
    lines = ["flush chain ip nat upnp"]
    for port, (host, to) in mappings.items():
        lines.append(f'add rule ip nat upnp iifname "{wan}" tcp dport {port} dnat to {host}:{to}')
    subprocess.run(["nft", "-f", "-"], input="\n".join(lines), text=True, check=True)


def act(action: str, asked: dict[str, str]) -> dict[str, str]:
    """What an action answers. Raises `Refused`."""
    port = asked.get("NewExternalPort", "")
    if action == "GetExternalIPAddress":
        shown = subprocess.run(["ip", "-4", "-o", "addr", "show", wan], capture_output=True, text=True, check=True).stdout
        return {"NewExternalIPAddress": shown.split()[3].partition("/")[0]}
    if action == "GetStatusInfo":
        return {"NewConnectionStatus": "Connected", "NewLastConnectionError": "ERROR_NONE", "NewUptime": "1"}
    if action == "AddPortMapping":
        if asked["NewLeaseDuration"] != "0":
            raise Refused("725", "OnlyPermanentLeasesSupported")
        mappings[port] = (asked["NewInternalClient"], asked["NewInternalPort"])
        write_rules()
        return {}
    if port not in mappings:
        raise Refused("714", "NoSuchEntryInArray")
    if action == "DeletePortMapping":
        del mappings[port]
        write_rules()
        return {}
    host, to = mappings[port]
    found = {"NewInternalPort": to, "NewInternalClient": host, "NewEnabled": "1"}
    return {**found, "NewPortMappingDescription": "x", "NewLeaseDuration": "0"}


class Handler(BaseHTTPRequestHandler):
    """The description, and the control of the one service that matters."""

    def do_GET(self) -> None:
        self._answer(200, DESCRIPTION)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        action = self.headers["SOAPAction"].strip('"').partition("#")[2]
        try:
            answer = "".join(f"<{k}>{v}</{k}>" for k, v in act(action, dict(re.findall(r"<(New\w+)>(.*?)</", body))).items())
            status, inner = 200, f'<u:{action}Response xmlns:u="{SERVICE}">{answer}</u:{action}Response>'
        except Refused as refusal:
            number, name = refusal.args
            status, inner = 500, (
                "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
                f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{number}</errorCode>'
                f"<errorDescription>{name}</errorDescription></UPnPError></detail></s:Fault>"
            )
        envelope = '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/">'
        self._answer(status, f'<?xml version="1.0"?>{envelope}<s:Body>{inner}</s:Body></s:Envelope>')

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def answer_searches() -> None:
    """SSDP: whoever searches for a gateway hears where its description is."""
    group = socket.inet_aton("239.255.255.250")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as searches:
        searches.bind(("", 1900))
        searches.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, struct.pack("4s4s", group, socket.inet_aton(inside)))
        while True:
            text, sender = searches.recvfrom(2048)
            if DEVICE.encode() in text:
                lines = ["HTTP/1.1 200 OK", "CACHE-CONTROL: max-age=120", f"ST: {DEVICE}", f"USN: uuid:1::{DEVICE}"]
                lines += ["EXT:", "SERVER: lab UPnP/1.0", f"LOCATION: http://{inside}:{HTTP_PORT}/root.xml", "", ""]
                searches.sendto("\r\n".join(lines).encode(), sender)


if __name__ == "__main__":
    chain = "add chain ip nat upnp { type nat hook prerouting priority -100; }"
    subprocess.run(["nft", "-f", "-"], input=chain, text=True, check=True)
    server = ThreadingHTTPServer((inside, HTTP_PORT), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    answer_searches()
