// The texts of a page whose contrast with what lies behind them is below `least`: [ratio, color, background, text].
(least) => {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext('2d', {willReadFrequently: true});
  const known = new Map();
  const rgba = color => {
    if (!known.has(color)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = color;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      known.set(color, [r, g, b, a / 255]);
    }
    return known.get(color);
  };
  const over = ([r, g, b, a], back) => [r, g, b].map((value, i) => value * a + back[i] * (1 - a));
  const light = color => {
    const [r, g, b] = color.map(value => value / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const isImage = style => style.backgroundImage !== 'none';
  const behind = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const style = getComputedStyle(e);
      if (isImage(style)) return null;
      const color = rgba(style.backgroundColor);
      layers.push(color);
      if (color[3] === 1) break;
    }
    return layers.reverse().reduce((back, layer) => over(layer, back), [255, 255, 255]);
  };
  const opacity = element => {
    let found = 1;
    for (let e = element; e; e = e.parentElement) found *= getComputedStyle(e).opacity;
    return found;
  };
  const found = new Map();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
    if (!text || !element.checkVisibility({checkVisibilityCSS: true, checkOpacity: true})) continue;
    if (['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(element.tagName)) continue;
    const box = element.getBoundingClientRect();
    if (box.width <= 1 || box.height <= 1) continue;
    const back = behind(element);
    if (!back) continue;
    const style = getComputedStyle(element);
    const color = element instanceof SVGElement ? style.fill : style.color;
    const [r, g, b, a] = rgba(color);
    const front = over([r, g, b, a * opacity(element)], back);
    const [low, high] = [light(front), light(back)].sort((x, y) => x - y);
    const ratio = (high + 0.05) / (low + 0.05);
    const key = `${front.map(Math.round)} on ${back.map(Math.round)}`;
    if (ratio < least && !found.has(key)) {
      found.set(key, [Math.round(ratio * 100) / 100, key, `${element.tagName}.${element.className.baseVal ?? element.className}`,
                      text.slice(0, 40)]);
    }
  }
  return [...found.values()];
}
