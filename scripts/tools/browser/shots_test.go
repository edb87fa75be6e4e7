package browser

import (
	"bytes"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"os"
	"path/filepath"
	"testing"

	"github.com/chromedp/chromedp"
)

// A shot is a screenshot of a part of a page.
type shot struct {
	name, page    string
	width, height int64
	as            media
	title         string // of the figure; "": the top of the page
}

var all = []shot{
	{"experiment-desk", "experiment.html", 1280, 800, media{kind: "screen", scheme: "light"}, ""},
	{"scaling-gray-print", "experiment.html", 720, 1000, media{kind: "print", scheme: "light", gray: true},
		"Strong scaling"},
	{"memory-dark", "experiment.html", 1280, 800, media{kind: "screen", scheme: "dark"}, "Memory by kind"},
	{"loss-phone", "runs.html", 390, 844, media{kind: "screen", scheme: "light"}, "Loss"},
	{"runs-desk", "runs.html", 1400, 900, media{kind: "screen", scheme: "light"}, ""},
	{"runs-phone", "runs.html", 400, 1800, media{kind: "screen", scheme: "light"}, ""},
	{"step-desk", "runs.html", 1280, 800, media{kind: "screen", scheme: "light"}, "Step 2 by rank"},
}

const (
	cells     = 48  // per side: pictures are compared by the mean shade of each cell
	mostMean  = 6.5 // mean difference, of 255 shades; Chromium 156 draws rows of step-desk half a pixel higher: 5.5
	far       = 40  // difference from which a cell counts as far
	mostFar   = .06 // share of far cells; likewise .043
	mostWider = .1  // relative difference of the sides, since machines have different fonts
)

// TestScreenshots compares pages with the pictures in testdata. It compares cells in gray, so that other fonts pass
// and a missing chart fails. After -update, look at the pictures.
func TestScreenshots(t *testing.T) {
	for _, s := range all {
		t.Run(s.name, func(t *testing.T) {
			data := s.take(t)
			for _, dir := range []string{*shots, map[bool]string{true: "testdata"}[*update]} {
				if dir == "" {
					continue
				}
				if err := os.MkdirAll(dir, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, s.name+".png"), data, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			stored, err := os.ReadFile(filepath.Join("testdata", s.name+".png"))
			if err != nil {
				t.Fatal(err)
			}
			compare(t, decode(t, data), decode(t, stored))
		})
	}
}

// take returns the picture, reduced to 216 colors.
func (s *shot) take(t *testing.T) []byte {
	p := open(t, s.page, s.width, s.height, s.as)
	picture := chromedp.CaptureScreenshot()
	if s.title != "" {
		id := ask[string](t, p, `[...document.querySelectorAll("figure")].find(f => `+
			`f.querySelector("h3").textContent.startsWith("`+s.title+`")).id`)
		picture = chromedp.Screenshot(chromedp.CSS("#" + id))
	}
	data, err := chromedp.Run(p, picture)
	if err != nil {
		t.Fatal(err)
	}
	p.clean(t)
	return reduced(t, decode(t, data))
}

// reduced returns a PNG of 216 colors.
func reduced(t *testing.T, m image.Image) []byte {
	var colors color.Palette
	for r := range 6 {
		for g := range 6 {
			for b := range 6 {
				colors = append(colors, color.RGBA{uint8(51 * r), uint8(51 * g), uint8(51 * b), 255})
			}
		}
	}
	out := image.NewPaletted(m.Bounds(), colors)
	draw.Draw(out, m.Bounds(), m, m.Bounds().Min, draw.Src)
	var data bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&data, out); err != nil {
		t.Fatal(err)
	}
	return data.Bytes()
}

func decode(t *testing.T, data []byte) image.Image {
	t.Helper()
	m, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func compare(t *testing.T, got, want image.Image) {
	t.Helper()
	for i, side := range [][2]int{{got.Bounds().Dx(), want.Bounds().Dx()}, {got.Bounds().Dy(), want.Bounds().Dy()}} {
		if d := float64(side[0]-side[1]) / float64(side[1]); d > mostWider || d < -mostWider {
			t.Errorf("side %d has %d pixels, had %d", i, side[0], side[1])
		}
	}
	a, b := means(got), means(want)
	sum, differ := 0.0, 0
	for i := range a {
		d := a[i] - b[i]
		if d < 0 {
			d = -d
		}
		sum += d
		if d > far {
			differ++
		}
	}
	if n := float64(len(a)); sum/n > mostMean || float64(differ)/n > mostFar {
		t.Errorf("cells differ by %.1f shades, %d of %d by more than %d; look at the picture, then store it with -update",
			sum/n, differ, len(a), far)
	}
}

// means returns the mean shades of the cells of a picture.
func means(m image.Image) []float64 {
	sums, counts := make([]float64, cells*cells), make([]float64, cells*cells)
	b := m.Bounds()
	for y := range b.Dy() {
		for x := range b.Dx() {
			i := y*cells/b.Dy()*cells + x*cells/b.Dx()
			sums[i] += float64(color.GrayModel.Convert(m.At(b.Min.X+x, b.Min.Y+y)).(color.Gray).Y)
			counts[i]++
		}
	}
	for i := range sums {
		sums[i] /= max(1, counts[i])
	}
	return sums
}
