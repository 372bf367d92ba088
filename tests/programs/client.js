// The client in JavaScript, for Node.js and its library of system calls, libuv. Arguments and output are those of the
// other clients.

'use strict';

const dgram = require('node:dgram');
const dns = require('node:dns');
const http = require('node:http');
const net = require('node:net');

const TIMEOUT_MS = 10_000;

const at = (address, port) => (net.isIPv6(address) ? `[${address}]:${port}` : `${address}:${port}`);

function split(target) {
  const [, host, port] = /^\[?(.*?)\]?:(\d+)$/.exec(target);
  return { host, port: Number(port) };
}

function httpGet(url) {
  return new Promise((resolve, reject) => {
    const request = http.get(url, { timeout: TIMEOUT_MS }, (response) => {
      const peer = at(response.socket.remoteAddress, response.socket.remotePort);
      let body = '';
      response.on('data', (chunk) => (body += chunk)).on('end', () => resolve([body.trim(), peer]));
    });
    request.on('error', reject);
  });
}

// Only a failure makes it try the next address of a name: it would wait an hour for anything else.
function tcp(target) {
  return new Promise((resolve, reject) => {
    const families = { autoSelectFamily: true, autoSelectFamilyAttemptTimeout: 3_600_000 };
    const socket = net.connect({ ...split(target), ...families });
    socket.on('data', (data) => {
      resolve([data.toString().split('\n')[0], at(socket.remoteAddress, socket.remotePort)]);
      socket.destroy();
    });
    socket.on('error', reject);
  });
}

function udp(target, connected) {
  const { host, port } = split(target);
  const question = connected ? 'connected' : 'unconnected';
  const socket = dgram.createSocket(net.isIPv6(host) ? 'udp6' : 'udp4');
  return new Promise((resolve, reject) => {
    socket.on('error', reject).on('message', (message, from) => {
      const [name, repeated] = message.toString().split(' ');
      if (repeated !== question) {
        reject(new Error(`${message} is no answer to ${question}`));
      }
      const peer = connected ? socket.remoteAddress() : from;
      resolve([name, at(peer.address, peer.port)]);
    });
    const sent = (error) => error && reject(error);
    if (connected) {
      socket.connect(port, host, (error) => (error ? reject(error) : socket.send(question, sent)));
    } else {
      socket.send(question, port, host, sent);
    }
    setTimeout(() => reject(new Error(`no answer from ${target}`)), TIMEOUT_MS).unref();
  }).finally(() => socket.close());
}

const operations = {
  http: httpGet,
  tcp,
  udp: (target) => udp(target, true),
  unconnected: (target) => udp(target, false),
  // By libc.
  resolve: async (name) => {
    const found = await dns.promises.lookup(name, { all: true, verbatim: true });
    return [found.map(({ address }) => address).join(' '), '-'];
  },
  // By c-ares, a resolver of its own.
  'resolve-c-ares': async (name) => [(await dns.promises.resolve4(name)).join(' '), '-'],
};

// A failure of every address of a name is one error with one of each inside.
const isRefusal = (error) => error.code === 'ECONNREFUSED';

async function main() {
  for (const argument of process.argv.slice(2)) {
    const [operation, target] = argument.split(/=(.*)/s);
    const [text, peer] = await operations[operation](target).catch((error) => {
      if (isRefusal(error)) return ['refused', '-'];
      throw error;
    });
    console.log(`${argument}\t${text}\t${peer}`);
  }
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
