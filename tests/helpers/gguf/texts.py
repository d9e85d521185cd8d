"""Two hundred short texts of all scripts, numbers, blanks, signs, emoji, marks and special tokens."""

from __future__ import annotations

_SCRIPTS = (
    "The rain in Spain, isn't it?", "they're sure WE'LL go; I'D say you've won", "IT'S HERS'T",
    "don't're 'sm o'clock", "camelCaseWord SHOUTedWord iPhone XMLHttpRequest", "Straße über Öl, ärgerlich",
    "l'été à Noël, cœur naïf", "¿Qué mañana? ¡Adiós, señor!", "Grüße aus Zürich", "ŁÓDŹ żółć gęślą jaźń",
    "İstanbul'da ığdır ŞİŞLİ", "Ελληνικά γράμματα, τέλος;", "ΑΒΓ δεζ ΗΘι", "Привет, мир! Ещё раз",
    "ПРИВЕТ приветМир", "Київ — їжак", "Հայերեն լեզու", "ქართული ენა", "עברית: שלום עולם",
    "العربية: مرحبا بالعالم، كيف؟", "فارسی می‌نویسم", "हिन्दी में लिखा है।", "বাংলা ভাষা", "தமிழ் மொழி",
    "తెలుగు లిపి", "ಕನ್ನಡ", "മലയാളം ലിപി", "ਪੰਜਾਬੀ", "ગુજરાતી", "සිංහල", "ภาษาไทยไม่มีช่องว่าง", "ພາສາລາວ",
    "မြန်မာစာ", "ភាសាខ្មែរ", "བོད་སྐད་", "አማርኛ ፊደል", "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ", "中文分词测试。", "繁體中文，測試！",
    "日本語のテスト、ですよ。", "カタカナとひらがな", "한국어 테스트입니다.", "漢字kanji混ぜtext",
    "ㄱㄴㄷ ㅏㅑㅓ", "Tiếng Việt có dấu", "Filipino: ang mga salita", "ꦗꦮ ꦧꦱ", "ᠮᠣᠩᠭᠣᠯ", "ⴰⵎⴰⵣⵉⵖ", "𐌰𐌱𐌲 𝔘𝔫𝔦 𝒮𝒸𝓇",
    "ﬁ ﬂ ﬃ ligatures", "ＡＢＣ ｄｅｆ ｆｕｌｌ", "ⅷ Ⅻ ℃ № ™ ℵ", "ªº µ ƒ ſs", "مرحباhelloשלום", "ñandú ñ",
    "Ａ１Ｂ２",
)  # fmt: skip
_NUMBERS = (
    "a ½ cup", "½", "3½ and ¾", "1", "12", "123", "1234", "12345", "1234567", "1,234,567.89", "3.14159", "-42",
    "+7 (900)", "0x1F 0b101 1e-10", "1st 2nd 3rd 4th", "²³ x² y₁", "①②③ ⑩", "٣٤٥ ۴۵۶ १२३", "１２３４", "Ⅳ Ⅷ",
    "一二三 三百", "$5.00 €7 £8 ¥900", "50%", "2026-11-27T03:29", "v1.2.3-rc4", "a1b2c3",
    "100000 1000000 10000000", "7 8 9", "1 000 000", "99bottles of 99",
)  # fmt: skip
_BLANKS = (
    " ", "  ", "   ", "a b", "a  b", "a   b", "a    b", " a", "  a", "a ", "a  ", "\n", "\n\n", "\n\n\n", "a\nb",
    "a\n\nb", "a\n\n\nb", "a \nb", "a  \n  b", "\n a", "\n  a", "\ta", "a\tb", "a\t\tb", "\t\n\t", "a\r\nb",
    "\r\n\r\n", "\r", "a\u00a0b", "a\u3000b", "a\u2009b", "\u2003\u2003a", "a\u200bb", "a\u2028b", "x \u00a0 y",
    "a" + " " * 17 + "b", " " * 40, "a.\n\n  b", "!\n!\n\n", "def f():\n    return 1\n", "  \n", "\n  \n",
    "a \t b", "\x0b\x0c", "a\x85b", "1 \n 2",
)  # fmt: skip
_SIGNS = (
    "!", "...", "…", "?!?!", "(a)", "[b]{c}", "<d>", "a--b", "a—b", "«q» „r“ ‘s’", "#tag @user", "a_b_c",
    "a/b\\c", "x=y+z", "a<b && c>d || !e", "`code` ~tilde~ ^hat^", "https://example.org/a?b=c&d=%20",
    "me@example.org", "//!/\n/a", "$x = {'k': [1, 2]};", "for (int i = 0; i < 10; ++i) {\n\t}", "'''doc'''",
    "\"it's\"", "·•◦ ★☆", "→ ⇒ ∀x∈ℝ ≤ ≠", "©®", "。，、！？", "a,b;c:d", "\\n \\t", "--flag=-1",
)  # fmt: skip
_EMOJI = (
    "😀", "😀😀", "a😀b", " 😀 ", "👍🏽", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "❤️", "1️⃣", "🏳️‍🌈", "☀︎ ☁️",
    "go 🚀 now!", "🤷🏾‍♀️ ok", "🧑‍💻", "🎉\n🎉",
)  # fmt: skip
_MARKS = (
    "e\u0301", "cafe\u0301s", "A\u030a B\u0308", "n\u0303o", "a\u0301\u0302\u0303", "\u0301a", " \u0301",
    "Z\u0351\u0327algo", "क्षि", "กำ", "ี่", "שָׁלוֹם", "مُحَمَّد", "が か\u3099", "각 ᄀ\u1161\u11a8",
    "x\u20d7", "a\u034fb", "o\u0308\nu\u0308",
)  # fmt: skip
#: With names that the vocabularies of the tests have as special or added tokens, and one that they have not.
_SPECIAL = ("<|begin|>hi", "a<|end|>b", "<|begin|><|end|>", "<|none|>", "x <|end|> y")

TEXTS = (*_SCRIPTS, *_NUMBERS, *_BLANKS, *_SIGNS, *_EMOJI, *_MARKS, *_SPECIAL)
assert len(set(TEXTS)) == len(TEXTS) >= 200
