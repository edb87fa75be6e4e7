package ring_test

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/ring/scan"
)

// A window is the segments [lo, hi) of a map. A state is one from the document's begin.
type window struct {
	lo, hi int
	state  bool
}

func drawStates(t *testing.T) *canvas {
	const left, token, top, pitch = 140.0, 10.0, 146.0, 80.0
	x := ring.Must(partition.NewSegments(partition.Shape{SeqQ: 64, SeqKV: 64, Size: 4, Layout: partition.Zigzag{}}))
	c := &canvas{w: 940, h: 584, title: "States before the segments of a zigzag over four ranks",
		desc: "Each segment sends its map to the next one. In later rounds windows of segments double, until each begins " +
			"with the document: then it is a state."}
	middle := func(i int) float64 { return left + token*(float64(x.All[i].Start)+float64(x.All[i].Rows.Len())/2) }
	node := func(row, i int, w window) {
		y, says := top+pitch*float64(row), fmt.Sprintf("%d–%d", w.lo, w.hi-1)
		if w.hi-w.lo < 2 {
			says = fmt.Sprint(w.lo)
		}
		if w.hi == 0 {
			says = "zero"
		}
		look, text := "map", "b m"
		if w.state {
			look, text = "r", "on"
		}
		c.rect(fmt.Sprintf("%s%d", look, x.All[i].Rank), middle(i)-34, y, 68, 30)
		c.text(text, middle(i), y+20, "%s", says)
	}
	c.text("b", 30, 77, "segments")
	c.text("s", 30, 106, "halo")
	for i, s := range x.All {
		c.rect(fmt.Sprintf("r%d", s.Rank), left+token*float64(s.Start)+.5, 56, token*float64(s.Rows.Len())-1, 30)
		c.text("on", middle(i), 77, "%d", i)
	}
	passes, slots, before := make([]*scan.Pass, 4), make([]map[scan.Slot]window, 4), make([]window, len(x.All))
	for r := range passes {
		c.rect(fmt.Sprintf("r%d", r), left+90*float64(r), 22, 14, 14)
		c.text("s", left+90*float64(r)+20, 34, "rank %d", r)
		for _, m := range scan.NewHalo(x, r, 3).Recv {
			at := x.All[x.Own[r][m.Block.Buf-1]].Start - 3
			c.rect(fmt.Sprintf("r%d", m.Peer), left+token*float64(at+m.Block.Lo), 96, token*float64(m.Block.Hi-m.Block.Lo), 8)
		}
		p := &scan.NewStates(x, r).Forward
		passes[r], slots[r] = p, map[scan.Slot]window{}
		for slot, place := range p.Maps {
			i := x.Own[r][place]
			slots[r][scan.Slot{At: slot}] = window{i, i + 1, false}
			node(0, i, window{i, i + 1, false})
		}
		for _, s := range p.Results {
			slots[r][scan.Slot{State: true, At: s.State}] = window{0, 1, true}
		}
	}
	c.text("b", 30, top+20, "own maps")
	c.text("b", 812, top+20, "sent")
	for round := range passes[0].Rounds {
		y, maps, states := top+pitch*float64(round+1), 0, 0
		fetch := func(from, to int, w window) {
			class := "a"
			if w.state {
				class = "a thin"
			}
			if x.All[from].Rank == x.All[to].Rank {
				class += " stays"
			}
			c.arrow(class, "M%g %gL%g %g", middle(from), y-pitch+32, middle(to)-18, y-3)
		}
		sent := map[[2]int][]window{}
		for r, p := range passes {
			for _, m := range p.Rounds[round].Send {
				sent[[2]int{r, m.Peer}] = append(sent[[2]int{r, m.Peer}], slots[r][m.Slot])
				maps, states = maps+bit(!m.Slot.State), states+bit(m.Slot.State)
			}
		}
		for r, p := range passes {
			for _, m := range p.Rounds[round].Recv {
				list := sent[[2]int{m.Peer, r}]
				w := list[0]
				slots[r][m.Slot], sent[[2]int{m.Peer, r}] = w, list[1:]
				if round == 0 {
					fetch(w.hi-1, w.hi, w)
					before[w.hi] = w
				}
			}
			for _, m := range p.Rounds[round].Compose {
				earlier, later := slots[r][m.Earlier], slots[r][m.Later]
				fetch(earlier.hi, later.hi, earlier)
				slots[r][m.Dst] = window{earlier.lo, later.hi, earlier.state}
				before[later.hi] = slots[r][m.Dst]
			}
		}
		c.text("b", 30, y+20, "round %d", round)
		c.text("s", 812, y+12, "%d maps", maps)
		c.text("s", 812, y+30, "%d state%s", states, "s"[:bit(states != 1)])
		for i, w := range before[1:] {
			if node(round+1, i+1, w); round > 0 {
				c.arrow("keeps", "M%g %gv%g", middle(i+1)+18, y-pitch+31, pitch-32)
			}
		}
	}
	node(len(passes[0].Rounds), 0, window{state: true})
	c.text("s", 30, 540, "A box has the numbers of the segments in a map (outlined) or a state (filled, half the bytes). "+
		"Dashed: on one")
	c.text("s", 30, 562, "rank. After round 3 each segment has the state before it. Halo: the three rows that the next "+
		"segment reads.")
	for r := range passes {
		c.style += fmt.Sprintf(".map%d{fill:var(--paper);stroke:var(--%d);stroke-width:2}", r, r)
	}
	c.style += "\n.thin{stroke-width:1.2}.stays{stroke-dasharray:5 4}.keeps{stroke:var(--rule);stroke-width:1.5}\n"
	return c
}
