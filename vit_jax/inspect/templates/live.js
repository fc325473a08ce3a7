'use strict';
// The script of the live page: sends images to the server that it came from, and shows the answers.

const LIMIT = document.body.dataset.maxBytes ? Number(document.body.dataset.maxBytes) : 0;

function make(tag, text, parent, kind) {
  const element = document.createElement(tag);
  if (text) element.textContent = text;  // never as HTML
  if (kind) element.className = kind;
  if (parent) parent.append(element);
  return element;
}

async function post(address, file) {
  let answer;
  try {
    answer = await fetch(address, {method: 'POST', body: file, headers: {'X-Vit-Jax': '1'}});
  } catch {
    throw new Error('The server does not answer. Is it still running?');
  }
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function percent(share) { return (100 * share).toFixed(1) + ' %'; }

function showClasses(found, card) {
  const list = make('ol', '', card, 'guesses');
  for (const guess of found.classes) {
    const item = make('li', '', list);
    const bar = make('i', '', item);
    bar.style.width = Math.max(100 * guess.probability, 0.5) + '%';
    make('span', guess.name, item);
    make('b', percent(guess.probability), item);
  }
  if (!found.classes.length) make('p', 'These weights have no classification head.', card, 'note');
}

function showAttention(file, card) {
  const button = make('button', 'Show attention', card, 'attention');
  button.type = 'button';
  button.addEventListener('click', async () => {
    button.disabled = true;
    button.textContent = 'Computing …';
    try {
      const found = await post('/attention', file);
      const row = make('div', '', null, 'maps');
      for (const [name, text] of [['overlay', 'attention rollout'], ['shade', 'as brightness']]) {
        const figure = make('figure', '', row);
        make('img', '', figure).src = found[name];
        figure.firstChild.alt = text;
        make('figcaption', text, figure);
      }
      button.replaceWith(row);
    } catch (error) {
      button.replaceWith(make('p', error.message, null, 'wrong'));
    }
  });
}

async function classify(file, list) {
  const card = make('article', '', null, 'card');
  list.prepend(card);
  make('h2', file.name, card);
  const waiting = make('p', 'Waiting for the network …', card, 'note');
  try {
    if (file.size > LIMIT) throw new Error(`Expected a file of at most ${LIMIT / 2 ** 20} MiB, got ${(file.size / 2 ** 20).toFixed(1)} MiB.`);
    const found = await post('/classify', file);
    waiting.remove();
    const image = make('img', '', card, 'prepared');
    image.src = found.image;
    image.alt = file.name;
    showClasses(found, card);
    make('p', `${found.size}, shown as the network gets it · ${found.seconds.toFixed(2)} s · ${found.weights}`, card, 'note');
    if (found.has_attention) showAttention(file, card);
  } catch (error) {
    waiting.replaceWith(make('p', error.message, null, 'wrong'));
  }
}

function watchImages(drop) {
  const list = document.getElementById('answers'), input = drop.querySelector('input');
  let last = Promise.resolve();
  const take = files => {
    for (const file of files) last = last.then(() => classify(file, list));  // one after the other
  };
  input.addEventListener('change', () => { take([...input.files]); input.value = ''; });
  for (const name of ['dragenter', 'dragover']) {
    document.addEventListener(name, event => { event.preventDefault(); drop.classList.add('over'); });
  }
  document.addEventListener('dragleave', event => { if (!event.relatedTarget) drop.classList.remove('over'); });
  document.addEventListener('drop', event => {
    event.preventDefault();
    drop.classList.remove('over');
    take([...event.dataTransfer.files]);
  });
  document.addEventListener('paste', event => take([...event.clipboardData.files]));
}

// The titles of an element that unfolds and of those around it, with the heading above.
function pathTo(one) {
  const titles = [];
  for (let at = one; at && at.tagName !== 'MAIN'; at = at.parentElement) {
    if (at.tagName === 'DETAILS') titles.push(at.querySelector('summary').textContent);
    for (let above = at; above; above = above.previousElementSibling) {
      if (/^H[23]$/.test(above.tagName)) { titles.push(above.textContent); break; }
    }
  }
  return titles.join(' / ');
}

// Loads the page again where what it shows has changed, and keeps the place and what is unfolded.
async function follow(known) {
  try {
    const state = await (await fetch('/state')).text();
    if (known !== null && state !== known) {
      const page = new DOMParser().parseFromString(await (await fetch(location.pathname)).text(), 'text/html');
      const unfolded = new Map([...document.querySelectorAll('details')].map(one => [pathTo(one), one.open]));
      for (const one of page.querySelectorAll('details')) one.open = unfolded.get(pathTo(one)) ?? one.open;
      document.querySelector('main').replaceWith(page.querySelector('main'));
      document.title = page.title;
    }
    known = state;
    document.body.classList.remove('lost');
  } catch {
    document.body.classList.add('lost');
  }
  setTimeout(follow, 2000, known);
}

const drop = document.getElementById('drop');
if (drop) watchImages(drop);
else follow(null);
