// Keeps the page new. The server sends sections as HTML, whoever's words are in them escaped; here they are put in place.
// A section is changed where it differs, so focus, selection, scrolling and open details stay as they are.

const STALE_S = 15 // without a word from the server, which says something every five seconds
const PATIENCE_S = 8 // with a stream that brings nothing
const POLL_S = 2
const POLLS = 30
const OLD_S = 60 // news of something that runs, after which it is marked as old
const LOST =
  "Connection lost. This page shows what was known before; the run itself is not touched. " +
  "If fairmesh watch has ended, start it again and open its new address."

const lost = document.getElementById("lost")
const age = document.getElementById("age")
let stream = null
let turn = 0 // which of several attempts to get news is the last one
let etag = ""
let heard = performance.now() // when the server was last heard
let ticked = Date.now()
let failed = false // whether the last attempt to reach the server failed
let newest = { at: heard, trouble: lost.textContent, read: 0, age: age.dataset.age === "" ? null : Number(age.dataset.age), live: age.dataset.live === "1" }

/** Makes the children of an element those of another one, and keeps every element that can stay. */
function morph(from, to) {
  const keyed = new Map([...from.children].filter((child) => child.dataset.key).map((child) => [child.dataset.key, child]))
  let at = from.firstChild
  for (const wanted of [...to.childNodes]) {
    const key = wanted.dataset?.key
    let match = key ? keyed.get(key) : at
    while (!key && match?.dataset?.key) match = match.nextSibling
    if (!match || match.nodeType !== wanted.nodeType || match.nodeName !== wanted.nodeName) {
      from.insertBefore(wanted, at)
      continue
    }
    if (match.contains(document.activeElement) || match.contains(getSelection().anchorNode)) {
      while (at && at !== match) {
        const next = at.nextSibling // what is moved loses them, so the others make way
        from.append(at)
        at = next
      }
    }
    if (match === at) at = at.nextSibling
    else from.insertBefore(match, at)
    if (match.nodeType !== Node.ELEMENT_NODE) {
      if (match.nodeValue !== wanted.nodeValue) match.nodeValue = wanted.nodeValue
      continue
    }
    for (const { name } of [...match.attributes]) if (name !== "open" && !wanted.hasAttribute(name)) match.removeAttribute(name)
    for (const { name, value } of wanted.attributes) if (match.getAttribute(name) !== value) match.setAttribute(name, value)
    morph(match, wanted)
  }
  while (at) {
    const next = at.nextSibling
    at.remove()
    at = next
  }
}

function receive(news) {
  heard = performance.now()
  failed = false
  newest = { at: heard, age: news.age, live: news.live, trouble: news.trouble, read: news.read }
  for (const [name, html] of Object.entries(news.sections)) {
    const section = document.getElementById(name)
    if (section) morph(section, new DOMParser().parseFromString(html, "text/html").body)
  }
  if (news.title && document.title !== news.title) document.title = news.title
  tick()
}

function inWords(seconds) {
  const [size, unit] = [[86400, "day"], [3600, "hour"], [60, "minute"]].find(([size]) => seconds >= 2 * size) ?? [1, "second"]
  const count = Math.round(seconds / size)
  return `${count} ${unit}${count === 1 ? "" : "s"}`
}

/** Shows how old the news is, and whether the server is still there. Seconds are counted here from the age that the
 * server told, so neither clock has to be right. */
function tick() {
  const slept = Date.now() - ticked > 10_000
  ticked = Date.now()
  if (slept) connect()
  const now = performance.now()
  const gone = failed || now - heard > 1000 * STALE_S
  const seconds = newest.age === null ? null : newest.age + (now - newest.at) / 1000
  const read = newest.trouble ? `, read ${inWords(newest.read + (now - newest.at) / 1000)} ago` : ""
  age.textContent = (seconds === null ? "no news yet" : `news ${inWords(seconds)} old`) + read
  age.classList.toggle("old", gone || Boolean(newest.trouble) || (newest.live && seconds > OLD_S))
  const said = gone ? LOST : newest.trouble
  if (lost.textContent !== said) lost.textContent = said // a reader of screens says it once
  lost.hidden = !said
}

/** Opens a stream. Where it does not open, or something between holds it back, this page asks for news instead, and
 * tries a stream again after a minute. Nothing is asked for while nobody sees the page. */
function connect() {
  const mine = ++turn
  stream?.close()
  if (document.hidden) return
  const opened = performance.now()
  const here = (stream = new EventSource("events"))
  here.addEventListener("news", (event) => receive(JSON.parse(event.data)))
  here.onerror = () => {
    failed = true
    tick()
    if (mine === turn && here.readyState === EventSource.CLOSED) poll()
  }
  setTimeout(() => mine === turn && heard < opened && poll(), 1000 * PATIENCE_S)
}

async function poll() {
  const mine = ++turn
  stream.close()
  for (let left = POLLS; left > 0 && mine === turn; left--) {
    try {
      const answer = await fetch("news", { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" })
      if (answer.status === 200) {
        receive(await answer.json())
        etag = answer.headers.get("ETag") ?? ""
      } else failed = answer.status !== 304
      if (!failed) heard = performance.now()
    } catch {
      failed = true
    }
    tick()
    await new Promise((resolve) => setTimeout(resolve, 1000 * POLL_S))
  }
  if (mine === turn) connect()
}

document.addEventListener("visibilitychange", connect)
addEventListener("online", connect)
addEventListener("pageshow", (event) => event.persisted && connect())
setInterval(tick, 1000)
connect()
