// Resolves names below localhost to this machine, as browsers do (RFC 6761, section 6.3).
'use strict'
const dns = require('node:dns')
const lookup = dns.lookup

dns.lookup = (name, options, callback) => {
  if (typeof options === 'function') [options, callback] = [{}, options]
  if (!name.endsWith('.localhost')) return lookup(name, options, callback)
  const found = { address: '127.0.0.1', family: 4 }
  process.nextTick(() => options.all ? callback(null, [found]) : callback(null, found.address, found.family))
}
