// Two js-libp2p peers at a bootstrap: what they find there, as one JSON object.
//
//     node --input-type=module - ADDRESS KEY < peers.mjs        in a folder with the packages of package.json
//
// The first one fills its Kademlia table, gets the value of KEY, and reserves at the relay; the second one dials it through
// that relay, and has 4 MiB echoed. ADDRESS may also be a WebSocket.
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { generateKeyPair } from '@libp2p/crypto/keys'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { webSockets } from '@libp2p/websockets'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const ECHO = '/test/echo/1'
const BYTES = 4 << 20
const [address, key] = process.argv.slice(2)
const bootstrap = multiaddr(address)
const found = {}

const node = (kind, listen = []) => generateKeyPair(kind).then(privateKey => createLibp2p({
  privateKey,
  addresses: { listen },
  transports: [tcp(), webSockets(), circuitRelayTransport()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: {
    identify: identify(),
    ping: ping(),
    dht: kadDHT({
      protocol: '/ipfs/kad/1.0.0',
      clientMode: true,
      peerInfoMapper: passthroughMapper,
      validators: { flockstep: async () => {} },
      selectors: { flockstep: () => 0 }
    })
  }
}))

async function until (condition) {
  while (!condition()) await new Promise(resolve => setTimeout(resolve, 20))
}

const first = await node('Ed25519', [`${address}/p2p-circuit`])
const second = await node('Ed25519')
await first.handle(ECHO, async stream => {
  for await (const data of stream) if (!stream.send(data)) await stream.onDrain()
  await stream.close()
}, { runOnLimitedConnection: true })

const connection = await first.dial(bootstrap)
await until(() => first.services.dht.routingTable.size > 0)
found.table = [...first.services.dht.routingTable.kb.toIterable()].map(peer => peer.peerId.toString())
found.agent = Buffer.from((await first.peerStore.get(connection.remotePeer)).metadata.get('AgentVersion')).toString()
for await (const event of first.services.dht.get(new TextEncoder().encode(key))) {
  if (event.name === 'VALUE') found.value = Buffer.from(event.value).toString()
}

await until(() => first.getMultiaddrs().length > 0)
const stream = await second.dialProtocol(first.getMultiaddrs(), ECHO, { runOnLimitedConnection: true })
found.relayed = stream.direction === 'outbound' && second.getConnections(first.peerId)[0].remoteAddr.toString().includes('/p2p-circuit')
let echoed = 0
const whole = (async () => {
  for await (const data of stream) {
    echoed += data.byteLength
    if (echoed >= BYTES) break
  }
})()
for (let sent = 0; sent < BYTES; sent += 65536) {
  if (!stream.send(new Uint8Array(65536))) await stream.onDrain()
}
await whole
found.echoed = echoed

for (const kind of ['RSA', 'secp256k1']) {
  const other = await node(kind)
  found[kind] = await other.dial(bootstrap).then(() => 'connected', error => error.name)
  await other.stop()
}
console.log(JSON.stringify(found))
process.exit(0)
