package ring_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/partition"
)

var update = flag.Bool("update", false, "rewrite the pictures in docs/concepts")

// TestPictures draws docs/concepts/*.svg from schedules and compares the bytes. After a change that should move
// something in them, rewrite them with -update and look at each in a browser, in light and in dark mode.
func TestPictures(t *testing.T) {
	for name, draw := range map[string]func(*testing.T) *canvas{
		"cover": drawCover, "ring": drawRing, "zigzag": drawZigzag, "allgather": drawAllGather, "ulysses": drawUlysses,
		"hierarchical": drawHierarchical, "documents": drawDocuments, "windows": drawWindows, "states": drawStates,
	} {
		t.Run(name, func(t *testing.T) {
			got, file := draw(t).svg(), filepath.Join("..", "docs", "concepts", name+".svg")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o666); err != nil {
					t.Fatal(err)
				}
			}
			if want, err := os.ReadFile(file); err != nil || got != string(want) {
				t.Errorf("%s is stale: go test ./ring -run TestPictures -update; %v", file, err)
			}
		})
	}
}

func rankClass(m mark) string { return fmt.Sprintf("r%d", m.rank) }

// drawCover draws a zigzag ring. The blocks and the squares of the mask move with the hops.
func drawCover(t *testing.T) *canvas {
	w := newWorld(t, "ring", "zigzag", spec(32, 4), -1)
	c := &canvas{w: 940, h: 456, title: "Ring attention over four ranks with a zigzag layout",
		desc: "A sequence is cut in eight chunks. Each of four ranks holds an early and a late one. Queries stay; " +
			"keys and values travel from rank to rank. In each hop all ranks compute as many pairs."}
	c.text("t", 30, 38, "Four ranks share one sequence. Queries stay; keys and values travel around the ring.")
	for r := range 4 {
		for i, at := range w.positions(r) {
			if i%4 == 0 {
				x := 30 + 27.5*float64(at)
				c.rect(fmt.Sprintf("r%d", r), x, 56, 108, 32)
				c.text("on", x+54, 77, "%d", at/4)
			}
		}
	}
	c.text("s", 30, 112, "Zigzag: each rank holds an early and a late chunk of the tokens, so that causal work is equal.")
	corner := [4][2]float64{{30, 146}, {326, 146}, {326, 302}, {30, 302}}
	for r, at := range corner {
		x, y := at[0], at[1]
		c.rect("box", x, y, 224, 96)
		c.text("b", x+16, y+28, "rank %d", r)
		c.text("s", x+16, y+68, "Q")
		c.chip(&w, r, 0, 8, x+34, y+48, 64)
		c.text("s", x+112, y+68, "K, V")
		c.block(&w, r, 0, 0, x+146, y+48, 64)
	}
	for _, a := range []string{"M260 194h58", "M438 246v48", "M320 350h-58", "M142 298v-48"} {
		c.arrow("a", "%s", a)
	}
	c.style = ".t{font-size:18px;font-weight:600}\n"
	for r, s := range w.all {
		x, y := corner[r][0]+146, corner[r][1]+48
		carried := s.Forward[0].SendKV[0].Block
		fmt.Fprintf(c, "<g class=\"k%d\">\n", r)
		c.chip(&w, r, carried.Lo, carried.Hi, x, y, 64)
		c.WriteString("</g>\n")
		if carried.Hi < 8 { // the rest is seen by the rank itself alone
			c.WriteString("<g class=\"stays\">\n")
			c.chip(&w, r, carried.Hi, 8, x, y, 64)
			c.WriteString("</g>\n")
		}
		c.text(fmt.Sprintf("b m n%d", r), 290, 279, "hop %d", r)
		c.style += fmt.Sprintf(".k%d{animation:move%d 12s infinite}@keyframes move%d{", r, r, r)
		for h := range 5 {
			to := corner[(r+h)%4]
			c.style += fmt.Sprintf("%s{transform:translate(%gpx,%gpx)}", []string{"0%,19%", "25%,44%", "50%,69%",
				"75%,94%", "100%"}[h], to[0]-corner[r][0], to[1]-corner[r][1])
		}
		light := func(low string) string {
			if r == 0 {
				return "0%,20%,100%{opacity:1}23%,97%{opacity:" + low + "}"
			}
			return fmt.Sprintf("0%%,%d%%,%d%%,100%%{opacity:%s}%d%%,%d%%{opacity:1}", 25*r-3, 25*r+23, low, 25*r,
				25*r+20)
		}
		c.style += fmt.Sprintf("}\n.h%d{animation:light%d 12s infinite}@keyframes light%d{%s}\n", r, r, r, light(".3")) +
			fmt.Sprintf(".n%d{opacity:%d;animation:name%d 12s infinite}@keyframes name%d{%s}\n", r, bit(r == 0), r, r,
				light("0"))
	}
	c.style += ".stays{animation:stays 12s infinite}@keyframes stays{0%,19%,100%{opacity:1}22%,97%{opacity:0}}\n" +
		"@media (prefers-reduced-motion:reduce){g,rect,text{animation:none!important}}\n"
	c.text("s m", 768, 138, "keys")
	c.matrix(&w, 640, 150, 256, func(m mark) string { return fmt.Sprintf("r%d h%d", m.rank, m.hop) })
	fmt.Fprintln(c, `<text class="s m" transform="translate(626 278) rotate(-90)">queries</text>`)
	all := w.marks()
	for i := range 8 {
		for k := range i + 1 {
			h := all[4*i+3][4*k].hop
			c.text(fmt.Sprintf("x h%d", h), 656+32*float64(k)-float64(5*bit(i == k)), 171+32*float64(i), "%d", h)
		}
	}
	c.text("s m", 768, 430, "number: the hop that computes it")
	return c
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

func drawRing(t *testing.T) *canvas {
	w := newWorld(t, "ring", "zigzag", spec(32, 4), -1)
	c := &canvas{w: 940, h: 540, title: "The hops of a ring",
		desc: "In each hop a rank computes its queries against one block of keys and values, and passes it on."}
	for r, s := range w.all {
		x := 190 + 185*float64(r)
		c.text("b", x, 44, "rank %d", r)
		c.text("s", x, 79, "Q")
		c.chip(&w, r, 0, 8, x+20, 60, 84)
		for i, hop := range s.Forward {
			n, who := owner(hop)
			y := 128 + 92*float64(n)
			c.block(&w, who, hop.Keys.Lo, hop.Keys.Hi, x+20, y, 84)
			c.rect(fmt.Sprintf("r%d", r), x+20, y+34, float64(partition.Pairs(hop.Tiles))*84/36, 6)
			if len(hop.SendKV) == 0 || i+1 == len(s.Forward) {
				continue
			}
			if to := hop.SendKV[0].Peer; to > r {
				c.arrow("a", "M%g %gL%g %g", x+110, y+22, x+200, y+92)
			} else {
				c.arrow("a", "M%g %gl36 28", x+110, y+22)
				c.text("s", x+92, y+70, "to rank %d", to)
				c.arrow("a", "M%g %gl36 28", 190-22.0, y+64)
			}
		}
	}
	for h, says := range []string{"own block", "1 rank before", "2 ranks before", "3 ranks before"} {
		c.text("b", 30, 128+92*float64(h)+14, "hop %d", h)
		c.text("s", 30, 128+92*float64(h)+34, "%s", says)
	}
	c.text("s", 30, 494, "Filled: keys and values of a chunk, in the color of the rank that owns it. Dashed: no query "+
		"here or later")
	c.text("s", 30, 516, "sees the chunk, so it is not sent. The bar is the work of the hop in (query, key) pairs: equal "+
		"on all ranks.")
	return c
}

func drawZigzag(t *testing.T) *canvas {
	c := &canvas{w: 940, h: 404, title: "Causal work by layout: contiguous and zigzag", desc: "Under a contiguous " +
		"layout ranks are idle in some hops; under a zigzag layout all ranks have equal work in every hop."}
	for i, layout := range []string{"contiguous", "zigzag"} {
		w, x := newWorld(t, "ring", partition.LayoutName(layout), spec(32, 4), -1), 30+460*float64(i)
		c.text("b", x, 40, "%s", layout)
		c.strip(&w, x, 54, 420, 28)
		c.text("s", x, 112, "queries (down) by keys")
		c.matrix(&w, x, 124, 192, rankClass)
		c.text("s", x+218, 112, "pairs of each rank in a hop")
		slowest := make([]int, 4)
		for h := range 4 {
			y := 126 + 48*float64(h)
			c.text("s", x+218, y+23, "hop %d", h)
			for r := range w.all {
				c.rect("box", x+266, y+10*float64(r)+.5, 154, 8)
			}
		}
		for r, s := range w.all {
			for _, hop := range s.Forward {
				h, _ := owner(hop)
				n := partition.Pairs(hop.Tiles)
				slowest[h] = max(slowest[h], n)
				c.rect(fmt.Sprintf("r%d", r), x+266, 126+48*float64(h)+10*float64(r), float64(n)*154/64, 9)
			}
		}
		c.text("b", x, 352, "slowest rank over mean: %.2f", 1/partition.Balance(partition.Work(w.Shape)))
		c.text("s", x, 378, "a hop lasts as long as its slowest rank: %d pairs in 4 hops",
			slowest[0]+slowest[1]+slowest[2]+slowest[3])
	}
	return c
}

func drawAllGather(t *testing.T) *canvas {
	w := newWorld(t, "allgather", "zigzag", spec(32, 4), -1)
	c := &canvas{w: 940, h: 424, title: "All-gather: all keys that a rank needs in one transfer",
		desc: "A rank computes with its own keys while the rows of all others arrive, then with those in one call."}
	c.text("b", 112, 40, "queries")
	c.text("b", 262, 40, "hop 0: own block")
	c.text("s", 262, 62, "all rows travel meanwhile")
	c.text("b", 512, 40, "hop 1: rows of all others")
	c.text("s", 512, 62, "one kernel call")
	for r, s := range w.all {
		y := 92 + 72*float64(r)
		c.text("b", 30, y+20, "rank %d", r)
		c.chip(&w, r, 0, 8, 112, y, 84)
		c.text("s m", 229, y+20, "×")
		c.chip(&w, r, 0, 8, 262, y, 84)
		c.text("s", 262, y+48, "%d pairs", partition.Pairs(s.Forward[0].Tiles))
		c.arrow("a", "M372 %gh118", y+14)
		for i, m := range s.Forward[0].RecvKV {
			for _, sent := range w.all[m.Peer].Forward[0].SendKV {
				if sent.Peer == r {
					c.block(&w, m.Peer, sent.Block.Lo, sent.Block.Hi, 512+108*float64(i), y, 84)
				}
			}
		}
		c.text("s", 512, y+48, "%d pairs", partition.Pairs(s.Forward[1].Tiles))
	}
	c.text("s", 30, 392, "Filled: keys and values of a chunk, in the color of the rank that owns it. Dashed: no query of "+
		"the rank sees it.")
	return c
}

func drawUlysses(t *testing.T) *canvas {
	s := spec(32, 4)
	s.Heads, s.KVHeads = 8, 4
	w := newWorld(t, "ulysses", "contiguous", s, -1)
	c := &canvas{w: 940, h: 330, title: "Ulysses: heads are exchanged for tokens",
		desc: "Before attention an all-to-all gives each rank all tokens of some heads. After it another one returns " +
			"the output to the owners of the tokens."}
	cell := func(x, row, head float64, heads, rank int) {
		c.rect(fmt.Sprintf("r%d", rank), x+26*head+.5, 84+40*row+.5, 26*float64(heads)-1, 39)
		c.text("on", x+26*head+26, 84+40*row+26, "%d", rank)
	}
	for i, says := range []string{"all layers: own tokens, all heads", "attention: all tokens, own heads",
		"all layers again"} {
		x := 44 + 322*float64(i)
		c.text("b", x, 40, "%s", says)
		c.text("s", x, 70, "8 heads")
		fmt.Fprintf(c, "<text class=\"s m\" transform=\"translate(%g 164) rotate(-90)\">tokens</text>\n", x-12)
		for r, one := range w.all {
			if i != 1 {
				cell(x, float64(r), 0, 8, r)
				continue
			}
			for _, m := range one.Q.Recv {
				cell(x, float64(m.Peer), float64(one.Q.First+m.Box.Heads.Lo), m.Box.Heads.Len(), r)
			}
		}
		if i < 2 {
			c.rect("ring", x+26*4, 84+40, 52, 40)
			c.text("s m", x+261, 140, "%s", []string{"Q, K, V", "O"}[i])
			c.arrow("a", "M%g 154h60", x+231)
			c.text("s m", x+261, 176, "all-to-all")
		}
	}
	c.style = ".ring{fill:none;stroke:var(--ink);stroke-width:3}\n"
	c.text("s", 30, 282, "The color is the rank that holds a part. Outlined: the part that rank 1 sends to rank 2 before "+
		"attention,")
	c.text("s", 30, 304, "two heads of its tokens. After attention rank 2 sends the output of the same part back.")
	return c
}

func drawHierarchical(t *testing.T) *canvas {
	s := spec(64, 8)
	s.Heads, s.KVHeads, s.Inner = 8, 8, 2
	w := newWorld(t, "hierarchical", "zigzag", s, -1)
	c := &canvas{w: 940, h: 372, title: "Hierarchical: heads inside a host, a ring between hosts",
		desc: "Ranks of one host exchange heads for tokens. Keys and values travel between the ranks of different hosts " +
			"that have the same heads."}
	place := func(r int) (x, y float64) { return 54 + 220*float64(r/2), 96 + 136*float64(r%2) }
	for g := range 4 {
		c.rect("box", 40+220*float64(g), 52, 168, 268)
		c.text("b", 54+220*float64(g), 78, "host %d", g)
	}
	for r, one := range w.all {
		x, y := place(r)
		c.rect(fmt.Sprintf("r%d", r/2), x, y, 140, 72)
		c.text("on", x+70, y+30, "rank %d", r)
		c.text("on", x+70, y+54, "heads %d–%d", one.Q.First, one.Q.First+one.Q.Heads-1)
		if r%2 == 0 {
			c.arrow("a both", "M%g %gv56", x+34, y+76)
			c.text("s", x+46, y+100, "all-to-all")
			c.text("s", x+46, y+118, "of heads")
		}
		to := one.Forward[0].SendKV[0].Peer
		if x2, _ := place(to); x2 > x {
			c.arrow("a", "M%g %gH%g", x+144, y+36, x2-4)
			c.text("s m", x+180, y+28, "K, V")
			continue
		}
		edge, end := 24.0, 92.0 // the way back to the first host: above the upper row, below the lower one
		if r%2 == 1 {
			edge, end = 346, 308
		}
		c.arrow("a", "M%g %gV%gH168V%g", x+114, end, edge, end)
	}
	return c
}

func drawDocuments(t *testing.T) *canvas {
	docs := []int{22, 6, 4, 9, 15, 8}
	c := &canvas{w: 940, h: 384, title: "Packed documents under each layout",
		desc: "Which rank holds which tokens of six packed documents, the balance of work, and the keys that travel."}
	c.text("b", 30, 62, "documents")
	c.text("b e", 858, 44, "slowest")
	c.text("b e", 858, 62, "over mean")
	c.text("b e", 922, 44, "keys")
	c.text("b e", 922, 62, "sent")
	at := 0.0
	for _, n := range docs {
		c.rect("box", 186+9*at+1.5, 46, 9*float64(n)-3, 22)
		c.text("s m", 186+9*(at+float64(n)/2), 62, "%d", n)
		at += float64(n)
	}
	for i, layout := range []string{"contiguous", "zigzag", "striped", "document-zigzag", "document"} {
		w, y := newWorld(t, "allgather", partition.LayoutName(layout), spec(64, 4), -1, docs...), 92+48*float64(i)
		c.text("b", 30, y+20, "%s", layout)
		c.strip(&w, 186, y, 576, 28)
		sent := 0
		for _, s := range w.all {
			for _, m := range s.Forward[0].SendKV {
				sent += m.Block.Hi - m.Block.Lo
			}
		}
		c.text("e", 858, y+20, "%.2f", 1/partition.Balance(partition.Work(w.Shape)))
		c.text("e", 922, y+20, "%d", sent)
	}
	c.text("s", 30, 356, "The color is the rank that holds a token. Sent: rows of keys and values that all four ranks "+
		"send in a forward pass.")
	return c
}

func drawWindows(t *testing.T) *canvas {
	c := &canvas{w: 940, h: 420, title: "A sliding window: only the rows inside it travel",
		desc: "The visible pairs of a window of eight keys. A rank fetches only the rows of other ranks that its window " +
			"reaches: the halo."}
	for i, layout := range []string{"contiguous", "zigzag"} {
		w, x := newWorld(t, "ring", partition.LayoutName(layout), spec(32, 4), 7), 30+460*float64(i)
		c.text("b", x, 40, "%s", layout)
		c.strip(&w, x, 54, 256, 26)
		c.matrix(&w, x, 92, 256, func(m mark) string {
			return fmt.Sprintf("r%d%s", m.rank, map[bool]string{true: " pale"}[m.hop == 0])
		})
		y := 66.0
		for r, s := range w.all {
			c.text("b", x+276, y, "rank %d fetches", r)
			y += 21
			if len(s.Forward[0].RecvKV) == 0 {
				c.text("s", x+276, y, "nothing")
				y += 21
			}
			for _, m := range s.Forward[0].RecvKV {
				c.text("s", x+276, y, "%d rows of rank %d", m.Block.Hi-m.Block.Lo, m.Peer)
				y += 21
			}
			y += 6
		}
	}
	c.text("s", 30, 382, "Queries (down) by keys; the color is the rank that computes a pair. Pale: with its own keys.")
	c.text("s", 30, 404, "Full color: with rows of another rank, which travel in one hop, beside the first kernel call.")
	return c
}
