package launch

import "testing"

// Each variable replaces the ones before it, as in huggingface_hub.
func TestHubCache(t *testing.T) {
	for _, name := range []string{"HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"} {
		t.Setenv(name, "")
	}
	for _, c := range [][3]string{
		{"HOME", "/home/x", "/home/x/.cache/huggingface/hub"}, {"XDG_CACHE_HOME", "/c", "/c/huggingface/hub"},
		{"HF_HOME", "/hf", "/hf/hub"}, {"HF_HUB_CACHE", "/hub", "/hub"},
	} {
		if t.Setenv(c[0], c[1]); HubCache() != c[2] {
			t.Errorf("%s: %s, want %s", c[0], HubCache(), c[2])
		}
	}
}
