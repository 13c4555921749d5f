"""Print docs/SUPPORT.md: python scripts/support_page.py > docs/SUPPORT.md"""

from common.support import markdown

if __name__ == "__main__":
    print(markdown(), end="")
